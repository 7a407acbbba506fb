"""What a policy is, which ones are known, and how a third party brings one."""
