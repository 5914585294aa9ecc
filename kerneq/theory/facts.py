"""x"""
FACTS=()
GLM_CLAIMS=()
