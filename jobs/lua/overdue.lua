-- Jobs past their deadline that do not drain yet. ARGV: prefix, limit. Reads only.
return redis.call('ZRANGEBYSCORE', PREFIX .. ':deadlines', '-inf', clock(), 'LIMIT', 0, ARGV[2])
