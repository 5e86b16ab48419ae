"""What every kind of save shares: steps on the disk, reads that are checked, folders that exist whole or not at all."""
