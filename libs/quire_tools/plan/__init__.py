"""`quire plan`: what a deployment needs and costs, before there is one."""
