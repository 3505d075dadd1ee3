"""Why a claim waits or was refused."""
