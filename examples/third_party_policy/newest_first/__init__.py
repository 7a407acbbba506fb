"""The policy: stock in three slots, its own implementation in the scheduler slot."""

from policies.base import STOCK, Policy, SlotImpl

policy = Policy(
    name="newest-first",
    version="0.1",
    description="SGLang's scheduler, but the newest waiting request is prefilled first",
    slots={**STOCK, "scheduler": "newest-first"},
    brings=(
        SlotImpl(
            slot="scheduler",
            name="newest-first",
            target="newest_first.queue:install",
            description="waiting requests in reverse order of arrival",
        ),
    ),
)
