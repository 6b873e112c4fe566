"""What an app is made of besides its formula: trainer, command, plan and demonstration.

Options and trainer of methods with a reference are in `posttrain_app.preference`, what several formulas compute is in
`posttrain_app.methods`.
"""

from posttrain_cli import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "AppTrainer": "posttrain_app.trainer",
        "Demonstration": "posttrain_app.demo",
        "LanguageConfig": "posttrain_app.config",
        "MethodConfig": "posttrain_app.config",
        "TemplateConfig": "posttrain_app.config",
        "app_command": "posttrain_app.command",
        "plan_app": "posttrain_app.plan",
        "run_app": "posttrain_app.run",
    },
)
