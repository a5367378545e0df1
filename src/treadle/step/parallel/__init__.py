"""Data-parallel training: the programs of a shard, of sums over shards, and of the update."""
