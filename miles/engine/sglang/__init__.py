"""SGLang servers: started, asked, given weights, watched and replaced."""
