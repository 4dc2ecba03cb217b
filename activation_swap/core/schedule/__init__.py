"""Pipeline schedules as data: when each (stage, microbatch) group moves, and what that saves."""
