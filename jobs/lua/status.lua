-- The public hash, with live figures that are still true: when every worker died, nobody was left to correct them,
-- nor to say that none serves the model. Reads only. ARGV: prefix, fresh ms.
local root, now = KEYS[1], clock()

local values = redis.call('HGETALL', root)
if #values == 0 then return {} end
local field = {}
for i = 1, #values, 2 do field[values[i]] = i + 1 end
local function set(name, value) values[field[name]] = value end
if TERMINAL[values[field.state]] then return values end

local live = false
local all = redis.call('HVALS', root .. ':running')
for _, one in ipairs(all) do live = live or cjson.decode(one).at + tonumber(ARGV[2]) >= now end
if not live then
  for i = 1, #IDLE, 2 do set(IDLE[i], IDLE[i + 1]) end
end
local nobody = 'no worker serves ' .. values[field.model]
local served = redis.call('ZCOUNT', model_key(values[field.model], 'workers'), now, '+inf') > 0
local reason = values[field.blocked_reason]
if served and reason == nobody then set('blocked_reason', '') end
if not served and reason == '' and redis.call('ZCARD', root .. ':leases') == 0 then set('blocked_reason', nobody) end
return values
