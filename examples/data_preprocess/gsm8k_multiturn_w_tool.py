"""Usage: python gsm8k_multiturn_w_tool.py --local_dir DIR [--source_dir DIR]"""

from hone.data.prepare import script

if __name__ == "__main__":
    print(script("gsm8k_multiturn_w_tool"))
