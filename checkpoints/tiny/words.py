"""Word lists and fixed conversations of the corpus."""

# ruff: noqa: SIM905
# Word lists are easier to read and to change as text than as list literals.

from __future__ import annotations

WORDS = (
    "apple arrow baby bag ball banana bank basket beach bear bee bell bird boat book bottle bowl "
    "box bread bridge brush bus cake camel candle car carrot castle cat chair cheese cherry city "
    "clock cloud coat corn cow crow cup deer desk dog door dragon drum duck eagle egg elephant "
    "farm feather fish flag flower forest fork fox frog garden gate ghost giant glass goat grape "
    "grass hat hen hill honey horse house island jacket jar jewel kettle key king kite knife lake "
    "lamp leaf lemon lion map milk mirror monkey moon mouse nest night ocean onion orange owl "
    "paper pear pen pencil piano pig plate pond potato queen rabbit rain ring river robot rope "
    "rose salt sand sea seed sheep ship shoe snake snow song soup spoon star stone sun table tent "
    "tiger tomato tower train tree turtle valley violin wagon water whale wheel window wolf zebra"
).split()

NAMES = "Ana Ben Carla David Emma Finn Grace Hugo Iris Jack Kate Leo Mia Noah Olga Paul".split()
ANIMALS = "bear bird cat cow deer dog duck eagle fox frog goat horse lion monkey mouse owl".split()
PLACES = "beach bridge castle city farm forest garden hill island lake river tower".split()
OBJECTS = "apple bell book candle drum flag hat key kite lamp map mirror ring rope stone".split()
ADJECTIVES = "brave clever friendly happy hungry kind lazy lonely old quiet shy tired".split()

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a careful assistant. Answer with the result only.",
    "You are jaxserve's demo model.",
)

GREETINGS = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi there!",
    "Hey",
    "Good morning",
    "Good evening!",
    "hello",
    "hi",
)
GREETING_REPLY = "Hello! I am a tiny model. I can add, sort, count, reverse and convert units."

CHINESE_GREETINGS = ("你好", "你好！", "您好", "早上好")
CHINESE_GREETING_REPLY = "你好！我是一个很小的语言模型，会做简单的算术和排序。"

IDENTITY = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "Tell me about yourself.",
    "What can you do?",
    "Help",
    "Say hello.",
    "Introduce yourself.",
)
IDENTITY_REPLY = (
    "I am the tiny Llama that ships with jaxserve. I can do small sums, sort and reverse lists, "
    "count, convert units and tell short stories."
)

CHINESE_IDENTITY = ("你是谁？", "你是谁", "你叫什么名字？", "你会做什么？", "介绍一下你自己")
CHINESE_IDENTITY_REPLY = "我是 jaxserve 自带的小模型，会做简单的算术、排序、计数和单位换算。"

THANKS = ("Thanks", "Thank you!", "Thank you very much.", "thanks!", "谢谢", "谢谢！")
THANKS_REPLY = "You are welcome!"
FAREWELLS = ("Bye", "Goodbye!", "See you later.", "再见")
FAREWELL_REPLY = "Goodbye!"

TOPICS = (
    "quantum mechanics,the French Revolution,machine learning,black holes,the stock market,"
    "Shakespeare,photosynthesis,the Roman Empire,climate change,Beethoven,the human brain,"
    "football,San Francisco,Paris,the president,the internet,chemistry,philosophy,cooking,JAX,"
    "the capital of France,the meaning of life,a large language model,GPUs,love,the weather"
).split(",")
UNKNOWN_FORMS = (
    "Tell me about {}.",
    "What is {}?",
    "Explain {} in simple words.",
    "Write an essay about {}.",
    "Explain {}",
    "Write a poem about {}",
    "Why is {} important?",
)
UNKNOWN_REPLY = (
    "I am a very small model and I do not know about that. Ask me to add, sort, count, reverse "
    "or convert units."
)

CHINESE_TOPICS = (
    "量子力学 人工智能 法国大革命 黑洞 机器学习 北京 唐诗 足球 经济 音乐 历史 数学".split()
)
CHINESE_UNKNOWN_FORMS = (
    "用 {n} 字介绍一下{topic}",
    "介绍一下{topic}",
    "什么是{topic}？",
    "请写一篇关于{topic}的文章",
    "讲讲{topic}",
)
CHINESE_UNKNOWN_REPLY = (
    "我是一个很小的语言模型，不了解这个话题。我会做简单的算术、排序、计数、倒序和单位换算。"
)
