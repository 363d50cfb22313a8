"""How far an honest result may be from the exact one."""
