"""`TrainerService`: commands as jobs, on disk, under supervision."""
