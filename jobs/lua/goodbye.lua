-- A worker leaves. ARGV: prefix, worker. Twice: it is gone already.
local worker, key = ARGV[2], PREFIX .. ':worker:' .. ARGV[2]

local before = redis.call('HGET', key, 'models') or ''
for model in string.gmatch(before, '[^\n]+') do redis.call('ZREM', model_key(model, 'workers'), worker) end
redis.call('DEL', key)
redis.call('ZREM', PREFIX .. ':workers', worker)
return { 'ok' }
