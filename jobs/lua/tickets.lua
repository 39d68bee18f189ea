-- Puts tickets into arq's queue until `want` of them wait there. ARGV: prefix, want, expiry ms, ticket, ids of the slots.
-- A slot that waits already counts; one in progress does not, and cannot be used: arq deletes it when it is done.
-- The score is the moment from which arq may start it: 1 is long ago on any worker's clock (0 would mean "gone").
-- Twice: the slots of the first call still wait, or are in progress.
local queue, want, sent, waiting = KEYS[1], tonumber(ARGV[2]), 0, 0

for i = 5, #ARGV do
  if waiting >= want then break end
  local id = ARGV[i]
  if not exists('arq:in-progress:' .. id) then
    if not (exists('arq:job:' .. id) and redis.call('ZSCORE', queue, id)) then
      redis.call('SET', 'arq:job:' .. id, ARGV[4], 'PX', ARGV[3])
      redis.call('ZADD', queue, 1, id)
      sent = sent + 1
    end
    waiting = waiting + 1
  end
end
return sent
