"""Usage: python search_qa.py --local_dir DIR [--source_dir DIR]"""

from hone.data.prepare import script

if __name__ == "__main__":
    print(script("search_qa"))
