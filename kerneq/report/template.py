"""The page's HTML; a Python string, so that it is installed wherever the package is."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kerneq report</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; }
  body { max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.6rem; margin-bottom: 0.2rem; }
  h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
  p { color: #555; margin-top: 0; max-width: 46rem; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th, td { padding: 0.4rem 0.8rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
  th { font-weight: 600; border-bottom: 2px solid #1b1b1b; }
  th:first-child, td:first-child, .left { text-align: left; }
  tr.best td { font-weight: 600; }
  figure { margin: 0; }
  figcaption { font-weight: 600; margin-bottom: 0.3rem; }
  .grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 2rem; }
  svg { width: 100%; height: auto; }
  .small td, .small th { font-size: 0.85rem; color: #555; }
</style>
</head>
<body>
<h1>kerneq report</h1>
<p>{{ runs | length }} run{{ "s" if runs | length != 1 }}. Accuracy and loss are those on the test images,
of the weights that were best on the held-out images; solver numbers are means over test samples and branches.</p>

<h2>Results</h2>
<div class="wide">
<table>
<tr><th>run</th><th class="left">model</th><th class="left">data</th><th>test accuracy</th><th>test loss</th>
<th>validation</th><th>parameters</th><th>solver steps</th><th>residual</th><th>not converged</th><th>seconds</th></tr>
{% for run in runs %}
<tr{% if loop.first and run.accuracy is not none %} class="best"{% endif %}>
<td>{{ run.name }}</td><td class="left">{{ run.model }}</td><td class="left">{{ run.data }}</td>
<td>{% if run.accuracy is not none %}{{ "%.2f %%" | format(100 * run.accuracy) }}{% else %}–{% endif %}</td>
<td>{% if run.loss is not none %}{{ "%.4f" | format(run.loss) }}{% else %}–{% endif %}</td>
<td>{% if run.validation is not none %}{{ "%.2f %%" | format(100 * run.validation) }}{% else %}–{% endif %}</td>
<td>{% if run.parameters is not none %}{{ "{:,}".format(run.parameters) }}{% else %}–{% endif %}</td>
<td>{% if run.steps is not none %}{{ "%.1f" | format(run.steps) }}{% else %}–{% endif %}</td>
<td>{% if run.residual is not none %}{{ "%.1e" | format(run.residual) }}{% else %}–{% endif %}</td>
<td>{% if run.unconverged is not none %}{{ "%.1f %%" | format(100 * run.unconverged) }}{% else %}–{% endif %}</td>
<td>{{ "%.1f" | format(run.seconds) }}</td></tr>
{% endfor %}
</table>
</div>

<h2>Curves</h2>
<div class="grid">
{% for title, drawing in figures %}
<figure><figcaption>{{ title }}</figcaption>{{ drawing | safe }}</figure>
{% endfor %}
</div>

<h2>Origin</h2>
<div class="wide">
<table class="small">
<tr><th>run</th><th>epochs</th><th>seed</th><th class="left">device</th><th class="left">source revision</th></tr>
{% for run in runs %}
<tr><td>{{ run.name }}</td><td>{{ run.rows | length }}</td><td>{{ run.seed }}</td><td class="left">{{ run.device }}</td>
<td class="left">{{ run.revision or "not recorded" }}</td></tr>
{% endfor %}
</table>
</div>
</body>
</html>
"""
