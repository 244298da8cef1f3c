"""What trimtab costs, each figure beside the floor it is measured against, in one run."""
