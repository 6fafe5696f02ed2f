"""Pictures of plans and of a feed's figures: SVG, HTML and PNG, without a network or a display.

May import: base, plan. Read first: ``drawing.py``, then ``plan.py``.
"""
