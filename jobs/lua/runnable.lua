-- How many tasks of a model could be leased now, counted up to a limit. ARGV: prefix, model, limit. Twice: counts again.
local model, limit, now, count = ARGV[2], tonumber(ARGV[3]), clock(), 0

sweep(model, now)
for _, entry in ipairs(redis.call('ZRANGE', model_key(model, 'ready'), 0, limit - 1)) do
  local root = root_of(string.sub(entry, 32))
  local ready = redis.call('ZCARD', root .. ':pending')
  local cap = tonumber(get(root .. ':meta', 'max_shards')) or 0 -- a job whose keys somebody deleted has none
  if cap > 0 and get(root .. ':meta', 'stop') == '' then
    ready = math.min(ready, math.max(1, cap - redis.call('ZCARD', root .. ':leases')))
  end
  count = count + ready
  if count >= limit then return limit end
end
return count
