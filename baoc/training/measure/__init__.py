"""What a plan needs to know: bytes and seconds, measured on this device or derived for an absent card."""
