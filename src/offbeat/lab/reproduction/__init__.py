"""Published results, run again by one command each: studies that are read from files, carried out, and told."""
