-- Writes down what is known of a shard that kills its workers. ARGV: prefix, job, task, fence, record as text,
-- trying ("1": the rows it names are about to run, so a lease that is lost from now on accuses them).
-- Twice: the same record.
local root, task = KEYS[1], ARGV[3]

if not held(root, task, ARGV[4]) then return { 'lost', get(root, 'state') } end
redis.call('HSET', root .. ':trials', task, ARGV[5], task .. '/trying', ARGV[6] == '1' and ARGV[4] or '')
return { 'ok', get(root, 'state') }
