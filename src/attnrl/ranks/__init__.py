"""What an engine over several processes is made of, whatever starts them: no verl, no Ray.

On every rank    verbs (what it is asked), sharded (score and learn over one FSDP2 module), weights (written, read,
                 summed)
In the driver    machines (do all see the same files), share (who computes what), arrival (do weights reach the
                 servers), watch (phases that cannot hang), session (nothing is left behind)
"""
