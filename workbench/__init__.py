"""What stands on the trainer, and is never imported by it: preparation of text, schedules, own loops, and more."""
