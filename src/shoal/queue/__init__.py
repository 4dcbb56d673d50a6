"""Experience between the coordinator and the trainer ranks, kept in Redis."""
