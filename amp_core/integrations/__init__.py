"""Our autocast and scaler in other training frameworks; each module imports its framework, and only that one."""
