-- A worker says that it lives, and what it serves. ARGV: prefix, protocol, worker, ttl ms, models as JSON ([] is
-- allowed), then name, value of its fields. Tells whether the worker was in the registry: one that is not, although it
-- spoke a second ago, learns that this Redis has lost its memory. Twice: the same record; the first reply counts.
local worker, now, ttl = ARGV[3], clock(), tonumber(ARGV[4])
local key, models = PREFIX .. ':worker:' .. worker, cjson.decode(ARGV[5])

redis.call('SET', PREFIX .. ':protocol', ARGV[2], 'NX')
local protocol = redis.call('GET', PREFIX .. ':protocol')
if protocol ~= ARGV[2] then return { 'protocol', protocol } end

local known = exists(key) and '1' or '0'
local before = redis.call('HGET', key, 'models') or ''
for model in string.gmatch(before, '[^\n]+') do redis.call('ZREM', model_key(model, 'workers'), worker) end
for _, model in ipairs(models) do
  redis.call('ZREMRANGEBYSCORE', model_key(model, 'workers'), '-inf', '(' .. whole(now))
  redis.call('ZADD', model_key(model, 'workers'), now + ttl, worker)
end
redis.call('DEL', key)
redis.call('HSET', key, 'seen_at', seconds(now), unpack(ARGV, 6))
redis.call('PEXPIRE', key, ttl)
redis.call('ZADD', PREFIX .. ':workers', now, worker)
redis.call('ZREMRANGEBYSCORE', PREFIX .. ':workers', '-inf', now - 86400000)
return { 'ok', known }
