"""Usage: python math_dataset.py --local_dir DIR [--source_dir DIR]"""

from hone.data.prepare import script

if __name__ == "__main__":
    print(script("math_dataset"))
