"""Foresee what a run needs: trace the real model in the real layout, without weights and without GPUs."""
