"""Run directories: the schema, the writer, the reader."""
