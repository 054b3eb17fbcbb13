"""What commands there are; nothing here imports what a command needs."""
