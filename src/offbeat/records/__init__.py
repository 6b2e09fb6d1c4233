"""Run directories: the schema, the writers, the reader, and the follower of a run that goes on."""
