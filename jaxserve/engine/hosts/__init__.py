"""One engine over several hosts: every host makes the same calls to the same programs (step 6).

One process per host, joined by `jax.distributed` into one mesh. Process 0 leads: it alone has a
scheduler, a queue and a front end, and it tells the others each call before it makes it
(`leader.LeadingDevice`). The others follow: receive, call, repeat (`follow.py`). All that travels is
the packed inputs of a step; results are replicated, so the leader reads its own copy.

    lead.py     what the command line and the engine process enter: leader, or the only process
    leader.py   joining, agreeing, publishing; what happens when a follower is lost
    follow.py   a follower from its start to its end
    line.py     one TCP connection: messages both ways, beats, and noticing that the other end died
    messages.py what travels
    facts.py    what must be the same on all hosts
    detect.py   --distributed auto
    runtime.py  jax.distributed

A connection carries no secret and no encryption: the leader listens on the given address only, and
with JAXSERVE_HOSTS_TOKEN set refuses whoever does not know it. Use it inside a private network.
"""
