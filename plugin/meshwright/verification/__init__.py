"""One training program under a plan and on one device, in float64, compared tensor by tensor."""
