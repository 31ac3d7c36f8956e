"""Usage: python countdown.py --local_dir DIR"""

from hone.data.prepare import script

if __name__ == "__main__":
    print(script("countdown"))
