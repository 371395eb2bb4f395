"""What an engine over several processes is made of, whatever starts them: no verl, no Ray.

On every rank    sharded (score and learn over one FSDP2 module), weights (written, read, summed)
In the driver    share (who computes what), arrival (do weights reach the servers), watch (phases that cannot hang),
                 session (nothing is left behind)
"""
