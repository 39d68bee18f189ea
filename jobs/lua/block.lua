-- Says why a job does not move, or that it moves again. ARGV: prefix, job, reason ("": unblock).
-- Work that succeeds (a lease after a refusal, a plan, a seal, a commit) unblocks by itself. Twice: no change.
local root = KEYS[1]

local state = get(root, 'state')
if state == '' then return { 'unknown' } end
if TERMINAL[state] then return { 'refused', state } end
if ARGV[3] == '' then unblock(root) else block(root, ARGV[3], 'worker') end
touch(root, clock())
return { 'ok', state }
