-- Forgets a job that has ended, and remembers that its id is used up. ARGV: prefix, job, tombstone ms, decided ("1": the
-- store holds its tombstone, so it had ended, whatever this Redis remembers: it may have been restored from an older
-- copy). Twice: the second call finds the tombstone.
local job, root = ARGV[2], KEYS[1]

if not exists(root) then return { exists(root .. ':tombstone') and 'ok' or 'unknown' } end
local state = get(root, 'state')
if not TERMINAL[state] then
  if ARGV[4] ~= '1' then return { 'refused', state } end
  retire(job)
  wipe(root)
end
redis.call('DEL', root, root .. ':meta', root .. ':parts', root .. ':events')
redis.call('ZREM', PREFIX .. ':jobs', job)
redis.call('SET', root .. ':tombstone', seconds(clock()), 'PX', ARGV[3])
return { 'ok' }
