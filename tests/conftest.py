"""Settings shared by all tests."""

from hypothesis import HealthCheck, settings

# Machines are shared and noisy: a slow example is not a failure.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("default")
