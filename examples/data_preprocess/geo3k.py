"""Usage: python geo3k.py --local_dir DIR [--source_dir DIR]"""

from hone.data.prepare import script

if __name__ == "__main__":
    print(script("geo3k"))
