-- Lengthens or ends the hold of a rebuild. ARGV: prefix, job, token, ms (0: the rebuild is complete).
-- Twice: the second call finds the hold as the first one left it, or the token gone.
local job, root, meta = ARGV[2], KEYS[1], KEYS[1] .. ':meta'

local token = get(meta, 'hold')
if token ~= ARGV[3] then return { 'lost', get(root, 'state') } end
local ms = tonumber(ARGV[4])
redis.call('HSET', meta, 'hold_until', ms > 0 and whole(clock() + ms) or '0')
if not TERMINAL[get(root, 'state')] then index(job) end
return { 'ok', get(root, 'state') }
