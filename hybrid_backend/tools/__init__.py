"""The commands around a server: plan, profile, doctor, status page, models to fetch. No serving code imports them."""
