"""Simulated traffic: requests that come and go, on the stock engine and on the hybrid backend."""
