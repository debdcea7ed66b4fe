"""BlockPool: fixed-size KV blocks, reference counts, sharing, copy-on-write, prefix cache."""
