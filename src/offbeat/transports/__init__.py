"""How live processes exchange messages."""
