"""Kills processes that write archives, and checks what they leave."""
