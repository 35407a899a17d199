"""The web page of `finetune demo`, and the folder that runs as a Space."""
