"""The limits of the policy file at a claim."""
