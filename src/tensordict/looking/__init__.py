"""Looking at data: trees for notebooks, reports of saves, plots."""
