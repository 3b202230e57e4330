"""Alignment on adapters over a frozen 4-bit base: supervised fine-tuning and preference losses."""
