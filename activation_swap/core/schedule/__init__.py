"""Pipeline schedules as data: when each chunk, (stage, microbatch), moves, and what that saves."""
