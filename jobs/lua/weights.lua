-- Takes over from model.json which weights a job's rows run on. ARGV: prefix, job, fingerprint.
-- No fence is asked for: it was decided in the store. Twice: the same again.
local root = KEYS[1]

local state = get(root, 'state')
if state == '' then return { 'unknown' } end
redis.call('HSET', root .. ':meta', 'fingerprint', ARGV[3])
return { 'ok', state }
