"""How fast it is: contenders measured in turns, and what a step is made of."""
